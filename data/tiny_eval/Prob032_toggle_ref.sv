module RefModule (
  input clk,
  input reset,
  input t,
  output reg data_out
);
  always @(posedge clk or posedge reset)
    if (reset) data_out <= 0;
    else if (t) data_out <= ~data_out;
endmodule
