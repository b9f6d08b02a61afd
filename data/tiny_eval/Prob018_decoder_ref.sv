module RefModule (
  input src,
  input ce,
  output [1:0] out
);
  assign out = ce ? 1 << src : 0;
endmodule
