module RefModule (
  input [9:0] first,
  input [9:0] second,
  output [9:0] max
);
  assign max = first > second ? first : second;
endmodule
