`timescale 1 ps/1 ps

module stimulus_gen (
  input clk,
  output reg [3:0] x,
  output reg neg
);
  integer pattern, common;
  initial begin
    x <= 0;
    neg <= 0;
    repeat (400) @(posedge clk, negedge clk) begin
      pattern = $urandom % 4;
      common = $urandom;
      x <= pattern == 0 ? common : pattern == 1 ? $urandom % 4 : $urandom;
      neg <= pattern == 0 ? common : pattern == 1 ? $urandom % 4 : $urandom;
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

  wire [3:0] x;
  wire neg;
  wire [3:0] o_ref;
  wire [3:0] o_dut;

  wire tb_match;
  wire tb_mismatch = ~tb_match;

  initial begin
    $dumpfile("wave.vcd");
    $dumpvars(1, clk, tb_mismatch, x, neg, o_ref, o_dut);
  end

  stimulus_gen stim1 (.clk, .x, .neg);
  RefModule good1 (.x, .neg, .o(o_ref));
  TopModule top_module1 (.x, .neg, .o(o_dut));

  // An unknown bit of the reference matches anything; one of the candidate matches only an unknown.
  assign tb_match = ({o_ref} === ({o_ref} ^ {o_dut} ^ {o_ref}));

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
