module RefModule (
  input [9:0] in0,
  input [9:0] in1,
  output [9:0] total,
  output carry
);
  assign {carry, total} = in0 + in1;
endmodule
