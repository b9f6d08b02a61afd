module RefModule (
  input clk,
  input resetn,
  output reg [3:0] out
);
  always @(posedge clk)
    if (!resetn) out <= 0;
    else if (out == 11) out <= 0;
    else out <= out + 1;
endmodule
