// Prob041_dff8r: pass
module TopModule (
  input  logic       clk, reset,
  input  logic [7:0] d,
  output logic [7:0] q
);
  always_ff @(posedge clk) begin : register
    if (reset) q <= '0;
    else       q <= d;
  end : register
endmodule : TopModule
