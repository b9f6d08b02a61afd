module RefModule (
  input clk,
  input clear,
  input inc,
  output reg [15:0] state
);
  always @(posedge clk)
    if (clear) state <= 0;
    else if (inc) state <= state + 1;
    else state <= state - 1;
endmodule
