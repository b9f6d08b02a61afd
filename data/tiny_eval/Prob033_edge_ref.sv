module RefModule (
  input clk,
  input [15:0] data_in,
  output reg [15:0] f
);
  reg [15:0] last;
  always @(posedge clk) begin
    last <= data_in;
    f <= ~data_in & last;
  end
endmodule
