module RefModule (
  input [5:0] left,
  input [5:0] right,
  input choose,
  output [5:0] result
);
  assign result = choose ? left + right : left & right;
endmodule
