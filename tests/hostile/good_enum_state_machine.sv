// Prob140_fsm_hdlc: pass
module TopModule (input logic clk, reset, in, output logic disc, flag, err);
  typedef enum logic [3:0] {S0, S1, S2, S3, S4, S5, S6, ERR, DISC, FLAG} state_t;
  state_t state, next;
  always_comb begin
    unique case (state)
      S0: if (in) next = S1; else next = S0;
      S1: if (in) next = S2; else next = S0;
      S2: if (in) next = S3; else next = S0;
      S3: if (in) next = S4; else next = S0;
      S4: if (in) next = S5; else next = S0;
      S5: if (in) next = S6; else next = DISC;
      S6: if (in) next = ERR; else next = FLAG;
      ERR: if (in) next = ERR; else next = S0;
      DISC, FLAG: if (in) next = S1; else next = S0;
      default: next = S0;
    endcase
  end
  always_ff @(posedge clk) if (reset) state <= S0; else state <= next;
  assign {disc, flag, err} = {state == DISC, state == FLAG, state == ERR};
endmodule
