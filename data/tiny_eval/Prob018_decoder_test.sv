`timescale 1 ps/1 ps

module stimulus_gen (
  input clk,
  output reg src,
  output reg ce
);
  integer pattern, common;
  initial begin
    src <= 0;
    ce <= 0;
    repeat (400) @(posedge clk, negedge clk) begin
      pattern = $urandom % 4;
      common = $urandom;
      src <= pattern == 0 ? common : pattern == 1 ? $urandom % 4 : $urandom;
      ce <= pattern == 0 ? common : pattern == 1 ? $urandom % 4 : $urandom;
    end
    #1 $finish;
  end
endmodule

module tb();
  typedef struct packed {
    int errors;
    int errortime;
    int clocks;
  } stats;
  stats stats1;

  reg clk = 0;
  initial forever #5 clk = ~clk;

  wire src;
  wire ce;
  wire [1:0] out_ref;
  wire [1:0] out_dut;

  wire tb_match;
  wire tb_mismatch = ~tb_match;

  initial begin
    $dumpfile("wave.vcd");
    $dumpvars(1, clk, tb_mismatch, src, ce, out_ref, out_dut);
  end

  stimulus_gen stim1 (.clk, .src, .ce);
  RefModule good1 (.src, .ce, .out(out_ref));
  TopModule top_module1 (.src, .ce, .out(out_dut));

  // An unknown bit of the reference matches anything; one of the candidate matches only an unknown.
  assign tb_match = ({out_ref} === ({out_ref} ^ {out_dut} ^ {out_ref}));

  // An explicit list: the module under test must have settled before it is compared.
  always @(posedge clk, negedge clk) begin
    stats1.clocks++;
    if (!tb_match) begin
      if (stats1.errors == 0) stats1.errortime = $time;
      stats1.errors++;
    end
  end

  final begin
    if (stats1.errors) $display("Hint: First mismatch occurred at time %0d.", stats1.errortime);
    $display("Simulation finished at %0d ps", $time);
    $display("Mismatches: %1d in %1d samples", stats1.errors, stats1.clocks);
  end

  initial begin
    #1000000
    $display("TIMEOUT");
    $finish();
  end
endmodule
