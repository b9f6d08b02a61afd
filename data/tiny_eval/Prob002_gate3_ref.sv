module RefModule (
  input [1:0] in0,
  input [1:0] in1,
  input [1:0] in2,
  output [1:0] f
);
  assign f = in0 | in1 | in2;
endmodule
