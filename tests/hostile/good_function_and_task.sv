// Prob041_dff8r: pass
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  function automatic [7:0] next(input r, input [7:0] v);
    next = r ? 8'h00 : v;
  endfunction
  task load(input [7:0] v);
    q <= v;
  endtask
  always @(posedge clk) load(next(reset, d));
endmodule
