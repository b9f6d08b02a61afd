module RefModule (
  input clk,
  input clear,
  input push,
  input pop,
  output hit
);
  reg state;
  always @(posedge clk)
    if (clear) state <= 0;
    else state <= state ? ~pop : push;
  assign hit = state;
endmodule
