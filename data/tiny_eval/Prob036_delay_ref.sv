module RefModule (
  input clk,
  input [9:0] d,
  output reg [9:0] f
);
  reg [9:0] stage;
  always @(posedge clk) begin
    stage <= d;
    f <= stage;
  end
endmodule
