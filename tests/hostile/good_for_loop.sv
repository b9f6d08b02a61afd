// Prob041_dff8r: pass
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  integer i;
  always @(posedge clk)
    for (i = 0; i < 8; i = i + 1) begin
      if (reset) q[i] <= 1'b0;
      else q[i] <= d[i];
    end
endmodule
