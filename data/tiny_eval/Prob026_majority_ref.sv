module RefModule (
  input a,
  input b,
  input c,
  output result
);
  assign result = (a & b) | (a & c) | (b & c);
endmodule
