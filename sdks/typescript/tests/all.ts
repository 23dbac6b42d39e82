/** Every test in one process: `node --expose-gc dist/tests/all.js`. */

import "./client.test.js";
import "./streams.test.js";
