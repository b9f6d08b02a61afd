module RefModule (
  input [9:0] p,
  input [9:0] r,
  input sel,
  output [9:0] result
);
  assign result = sel ? p : r;
endmodule
