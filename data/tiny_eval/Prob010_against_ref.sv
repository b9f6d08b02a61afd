module RefModule (
  input [5:0] d,
  output f
);
  assign f = d == 10;
endmodule
