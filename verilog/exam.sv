// Replays the questions to the answer, alone, and notes its outputs: sort 0 settled at the end of a
// time step; 1 at once after the first change; 2 the exam is over. The first change of a time step is
// blocking, as that of a clock; what follows comes with the nonblocking assignments, as a flip-flop's.
// What holds before any process starts is no change.
module ExamOfTopModule;@unit@
  integer questions = $fopen("questions.txt", "r"), answers = $fopen("answers.txt", "w");
  reg [63:0] now, next, noted = 0;
  reg [@wide@:0] vector;
  integer found = $fscanf(questions, "%d %b", next, vector);
  @nets@
  TopModule top_module1(@connections@);
  wire [@many@:0] given = {@outs@};
  reg [@many@:0] settled;
  reg tick = 0, fresh, no_input;
  initial begin
    $fstrobe(answers, "%0d 0 %b", $time, given);
    while (found == 2) begin
      now = next;
      if (now > $time) #(now - $time);
      settled = given;
      {@ins@} = vector;
      fresh = 1;
      found = $fscanf(questions, "%d %b", next, vector);
      while (fresh || found == 2 && next == now) begin
        if (found == 2 && next == now) begin
          {@ins@} <= vector;
          tick <= !tick;
        end
        if (fresh) begin
          #0 if (given !== settled) $fdisplay(answers, "%0d 1 %b", now, given);
        end
        fresh = 0;
        if (found == 2 && next == now) begin
          @(tick) found = $fscanf(questions, "%d %b", next, vector);
        end
      end
    end
    $fdisplay(answers, "%0d 2 0", $time);
    $finish;
  end
  always @(given) if (noted != $time) begin
    noted = $time;
    $fstrobe(answers, "%0d 0 %b", $time, given);
  end
endmodule
