// Page digests; digest.py holds the definition and the numpy form.
#include <stdint.h>
#include <string.h>

// Digests of `num_pages` pages: out[k] is that of the page at pool + pages[k] * page_stride.
// Words are little-endian; digest.py does not load this file on other hosts.
void weft_digest_pages(const uint8_t *pool, int64_t page_stride, const int64_t *pages,
                       int64_t num_pages, int64_t num_words, uint64_t *out) {
  for (int64_t k = 0; k < num_pages; k++) {
    const uint8_t *page = pool + pages[k] * page_stride;
    uint64_t sum = 0, state = 0;
    for (int64_t i = 0; i < num_words; i++) {
      uint64_t word;
      memcpy(&word, page + 8 * i, sizeof word);  // The address need not be aligned.
      state += 0x9E3779B97F4A7C15u;
      uint64_t z = word + state;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      sum += z ^ (z >> 31);
    }
    out[k] = sum;
  }
}
