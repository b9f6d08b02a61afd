// Prob041_dff8r: pass
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  reg tick = 0;
  initial forever #3 tick = ~tick;
  always @(posedge clk) if (reset) q <= 0; else q <= d;
endmodule
