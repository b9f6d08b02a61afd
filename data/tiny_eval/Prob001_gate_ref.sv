module RefModule (
  input [9:0] x,
  input [9:0] y,
  output [9:0] outp
);
  assign outp = x ^ y;
endmodule
