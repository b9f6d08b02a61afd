// Prob041_dff8r: pass
(* keep = "true" *)
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  (* full_case, parallel_case *)
  always @(posedge clk) if (reset) q <= 0; else q <= d;
endmodule
