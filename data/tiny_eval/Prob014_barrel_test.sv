`timescale 1 ps/1 ps

module stimulus_gen (
  input clk,
  output reg [31:0] data_in,
  output reg [4:0] n
);
  integer pattern, common;
  initial begin
    data_in <= 0;
    n <= 0;
    repeat (400) @(posedge clk, negedge clk) begin
      pattern = $urandom % 4;
      common = $urandom;
      data_in <= pattern == 0 ? common : pattern == 1 ? $urandom % 4 : $urandom;
      n <= pattern == 0 ? common : pattern == 1 ? $urandom % 4 : $urandom;
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

  wire [31:0] data_in;
  wire [4:0] n;
  wire [31:0] f_ref;
  wire [31:0] f_dut;

  wire tb_match;
  wire tb_mismatch = ~tb_match;

  initial begin
    $dumpfile("wave.vcd");
    $dumpvars(1, clk, tb_mismatch, data_in, n, f_ref, f_dut);
  end

  stimulus_gen stim1 (.clk, .data_in, .n);
  RefModule good1 (.data_in, .n, .f(f_ref));
  TopModule top_module1 (.data_in, .n, .f(f_dut));

  // An unknown bit of the reference matches anything; one of the candidate matches only an unknown.
  assign tb_match = ({f_ref} === ({f_ref} ^ {f_dut} ^ {f_ref}));

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
