// Prob041_dff8r
module TopModule(input clk, output supply1 reset, input [7:0] d, output reg [7:0] q);
  initial q = 0;
endmodule
