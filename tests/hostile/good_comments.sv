// Prob041_dff8r: pass
// This used to call $finish; it prints no "Mismatches: 0 in 432 samples" and needs no `include "x".
/* $fopen("x"); force tb.tb_match = 1;
   module RefModule; final $display("x"); endmodule */
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  // `line 1 "tb.sv" 0 and good1.q
  always @(posedge clk) if (reset) q <= 0; else q <= d;
endmodule
