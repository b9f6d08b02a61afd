// Prob041_dff8r: pass
`timescale 1ns/1ps
package pk; typedef enum logic [1:0] {A,B,C} st; typedef struct packed {logic [3:0] hi; logic [3:0] lo;} pair; function automatic pair mk(input [7:0] x); mk.hi = x[7:4]; mk.lo = x[3:0]; endfunction parameter int N = 8; endpackage
import pk::*;
primitive mux(o,a,b,s); output o; input a,b,s; table 0 ? 0 : 0; 1 ? 0 : 1; ? 0 1 : 0; ? 1 1 : 1; endtable endprimitive
interface bus; logic [7:0] v; endinterface
module leaf #(parameter W=8)(input ck, input [W-1:0] d, output logic [W-1:0] q, inout tri [W-1:0] io);
  always_ff @(posedge ck) q <= d;
  assign io = ck ? d : 'z;
endmodule
module TopModule(input clk, input reset, input [7:0] d, output [7:0] q);
  event go; reg [7:0] mem [0:15]; reg [7:0] m2 [0:3][0:1]; wire [7:0] w [0:3]; genvar i;
  wire [7:0] io; wire [7:0] t1; st state; pair p; reg [7:0] r; real x = 0.5; time tm; string s = "v0x123_0 S_0x12"; 
  int qq [$]; 
  bus b0();
  leaf #(8) l0(.ck(clk), .d(d), .q(t1), .io(io));
  leaf #(8) ll [1:0] (.ck(clk), .d(d), .q(), .io());
  generate for (i=0;i<4;i=i+1) begin : g if (i==0) assign w[i] = d; else assign w[i] = w[i-1] + 1; end endgenerate
  assign #1 io = reset ? 8'h55 : 8'bz;
  pullup(io[0]); bufif1 bb(io[1], d[1], clk); notif0 nn(io[2], d[2], clk); nmos n1(io[3], d[3], clk); cmos c1(io[4], d[4], clk, ~clk);
  wire um; mux u1(um, d[0], d[1], d[2]);
  wire [7:0] sh = d >>> 2, sl = {4{d[1:0]}}, mu = d * 3, di = d / 3, po = d ** 2, ab = &d ? ~d : ^d;
  wire signed [7:0] sd = d; wire cmp = sd < 0, ceq = d === 8'hxx, cw = d ==? 8'b1???????;
  task automatic tk(input [7:0] a, output [7:0] o); begin : inner reg [7:0] z; z = a; o = z; end endtask
  function [7:0] fn(input [7:0] a); integer k; begin fn = 0; for (k=0;k<8;k=k+1) fn[k] = a[7-k]; end endfunction
  wire [7:0] rv = fn(d); wire [3:0] on = $countones(d); wire [31:0] cl = $clog2(d);
  always @(posedge clk) begin mem[d[3:0]] <= d; -> go; p = pk::mk(d); tk(d, r); b0.v <= d; end
  always @(go or negedge reset) fork begin tm = $time; end begin r = mem[3]; end join
  initial begin : blk forever begin @(posedge clk); if (reset) disable blk; end end
  always @(posedge clk) begin case (state) A: state <= B; B: state <= C; default: state <= A; endcase end
  always @* begin casez (d) 8'b1???????: x = 1.5; default: x = 2.5; endcase end
  initial begin wait (reset === 0); repeat (3) @(negedge clk) qq.push_back(d); $display("%m %s %t v0x1_0", s, $realtime); end
  reg [7:0] lat; always_latch if (clk) lat <= d;
  reg [7:0] ca; initial begin assign ca = d; #3 deassign ca; end
  reg [7:0] rq; always @(posedge clk) rq <= #1 reset ? 0 : d; 
  reg [7:0] real_q; always @(posedge clk) if (reset) real_q <= 0; else real_q <= d;
  assign q = real_q;
  specify (clk *> q) = (0,0); endspecify
  class K; int a; function new(); a = 1; endfunction endclass
  K k; initial begin k = new; k.a = 4; end
  wire [7:0] hier = l0.q; 
  always @(posedge clk) begin : blk2 reg y; y = 1; end
endmodule
