module RefModule (
  input [31:0] in,
  output [31:0] res
);
  assign res = in >> 1;
endmodule
