#!/usr/bin/env bash
# What cuobjdump shows of a kernel with two copies, one of them of the form that devices refuse.
cat <<'TEXT'
		Function : a_kernel
        /*0100*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR4][R8.64], P0 ;
        /*0110*/                   LDGSTS.E.BYPASS.128 [R2+UR0+0x800], desc[UR1][R8.64], P0 ;
TEXT
