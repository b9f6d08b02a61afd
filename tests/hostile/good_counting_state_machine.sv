// Prob140_fsm_hdlc: pass
module TopModule(clk, reset, in, disc, flag, err);
  input clk, reset, in;
  output disc, flag, err;
  reg [2:0] ones;
  reg [1:0] kind;
  assign disc = kind == 2'd1, flag = kind == 2'd2, err = ones == 3'd7;
  always @(posedge clk) begin
    kind <= 2'd0;
    if (reset) ones <= 3'd0;
    else if (in) ones <= (ones == 3'd7) ? 3'd7 : ones + 3'd1;
    else begin
      ones <= 3'd0;
      if (ones == 3'd5) kind <= 2'd1;
      if (ones == 3'd6) kind <= 2'd2;
    end
  end
endmodule
