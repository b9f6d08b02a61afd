// Prob022_mux2to1: compile
module TopModule(input a, b, sel, output reg out);
  always @(*) out = 0;
endmodule
