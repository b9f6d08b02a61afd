module RefModule (
  input [4:0] data_in,
  output [4:0] outp
);
  assign outp = data_in;
endmodule
