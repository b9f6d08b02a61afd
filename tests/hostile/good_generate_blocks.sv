// Prob041_dff8r: pass
module TopModule #(parameter W = 8) (input clk, input reset, input [W-1:0] d, output [W-1:0] q);
  genvar i;
  generate for (i = 0; i < W; i = i + 1) begin : bits
    reg r;
    always @(posedge clk) r <= d[i] & ~reset;
  end endgenerate
  assign q = {bits[7].r, bits[6].r, bits[5].r, bits[4].r, bits[3].r, bits[2].r, bits[1].r, bits[0].r};
endmodule
