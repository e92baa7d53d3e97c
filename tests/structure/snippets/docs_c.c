/* SPDX-License-Identifier: Apache-2.0 */
#include <bifolio/c/bifolio.h>

int wait_for_blocks(void);
int fail(const char* why);
void project(int32_t layer, const bifolio_step_view* view, float* q, float* k, float* v);

int decode(bifolio_cache cache, bifolio_seq a, bifolio_seq b, int32_t token_of_a, int32_t token_of_b,
           bifolio_stream stream, int32_t num_layers, float* q, float* k, float* v, bifolio_tensor q_tensor,
           bifolio_tensor k_tensor, bifolio_tensor v_tensor, bifolio_tensor out_tensor) {
  /* snippet */
  return 0;
}
