module RefModule (
  input p,
  input q,
  input r,
  output [1:0] out
);
  assign out = p + q + r;
endmodule
