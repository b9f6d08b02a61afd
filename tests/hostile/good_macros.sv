// Prob041_dff8r: pass
`define WIDTH 8
`define NEXT(r, v) ((r) ? {`WIDTH{1'b0}} : (v))
`ifndef NEVER
module TopModule(input clk, input reset, input [`WIDTH-1:0] d, output reg [`WIDTH-1:0] q);
  always @(posedge clk) q <= `NEXT(reset, d);
endmodule
`endif
