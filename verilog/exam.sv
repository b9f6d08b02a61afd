// Notes the answer's outputs. The testbench itself asks the questions, in a program without any
// reference; this module is one more listener beside the answer, connected as the answer is.
//
// A line: time, 1 if the inputs began this time step (else the outputs did), moment, outputs.
// Moments count through a time step: 1 at once; 2 after `#0`; 3 after the nonblocking assignments;
// 4 after `#0` again, and so on. The last line has 2 in the second place: the simulation is over.
// (Names of its own end in _, so that no port is called the same.)
module Recorder@secret@(@listening@);@unit@
  integer answers_ = $fopen("answers.txt", "w");
  reg no_input_;
  reg [63:0] step_ = 64'd0;      // the time of the step that runs
  reg [63:0] walked_ = ~64'd0;  // the last that was walked through
  integer moment_ = 1;
  reg by_inputs_ = 0, noted_ = 0;
  reg [@wide@:0] before_ = {@ins@};
  @heard@
  reg [@many@:0] last_;

  task begin_step_;
    if ($time != step_) begin
      step_ = $time;
      moment_ = 1;
      by_inputs_ = {@ins@} !== before_;
    end
  endtask

  task note_;
    if (!noted_ || {@outs@} !== last_) begin
      noted_ = 1;
      last_ = {@outs@};
      $fdisplay(answers_, "%0d %0d %0d %b", step_, by_inputs_, moment_, last_);
    end
  endtask

  task walk_;
    if ($time != walked_) begin
      walked_ = $time;
      begin_step_;
      repeat (3) begin
        // Assigned with the answer's own, so it has changed before anyone looks.
        moment_ <= moment_ + 2;
        #0 moment_ = moment_ + 1;
        note_;
        @(moment_) note_;
      end
    end
  endtask

  initial begin
    note_;
    walk_;
    forever begin
      @(@anything@);
      walk_;
    end
  end
  always @(@inputs@) begin
    begin_step_;
    before_ = {@ins@};
  end
  always @(@outputs@) begin
    begin_step_;
    note_;
  end
  final $fdisplay(answers_, "%0d 2 0 0", $time);
endmodule
