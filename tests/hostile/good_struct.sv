// Prob041_dff8r: pass
module TopModule(input logic clk, reset, input logic [7:0] d, output logic [7:0] q);
  typedef struct packed { logic [3:0] high; logic [3:0] low; } pair_t;
  pair_t pair;
  always_ff @(posedge clk) if (reset) pair <= '0; else begin pair.high <= d[7:4]; pair.low <= d[3:0]; end
  assign q = {pair.high, pair.low};
endmodule
