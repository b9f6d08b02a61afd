module RefModule (
  input [31:0] data_in,
  input [4:0] n,
  output [31:0] f
);
  assign f = data_in >> n;
endmodule
