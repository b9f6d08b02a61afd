module RefModule (
  input clk,
  input reset,
  output reg [7:0] out
);
  always @(posedge clk)
    if (reset) out <= 0;
    else out <= out - 1;
endmodule
