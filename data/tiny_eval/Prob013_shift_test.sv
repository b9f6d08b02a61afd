`timescale 1 ps/1 ps

module stimulus_gen (
  input clk,
  output reg [31:0] in
);
  integer pattern, common;
  initial begin
    in <= 0;
    repeat (400) @(posedge clk, negedge clk) begin
      pattern = $urandom % 4;
      common = $urandom;
      in <= pattern == 0 ? common : pattern == 1 ? $urandom % 4 : $urandom;
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

  wire [31:0] in;
  wire [31:0] res_ref;
  wire [31:0] res_dut;

  wire tb_match;
  wire tb_mismatch = ~tb_match;

  initial begin
    $dumpfile("wave.vcd");
    $dumpvars(1, clk, tb_mismatch, in, res_ref, res_dut);
  end

  stimulus_gen stim1 (.clk, .in);
  RefModule good1 (.in, .res(res_ref));
  TopModule top_module1 (.in, .res(res_dut));

  // An unknown bit of the reference matches anything; one of the candidate matches only an unknown.
  assign tb_match = ({res_ref} === ({res_ref} ^ {res_dut} ^ {res_ref}));

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
