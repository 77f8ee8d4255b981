// Columns of the report: decoded when an operation is looked at for the first time.

const ARRAYS = { u1: Uint8Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

function unpack(column) {
  const text = atob(column.data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new ARRAYS[column.type](bytes.buffer);
}

const unpackTexts = ({ values, codes }) => ({ values, codes: unpack(codes) });

class Detail {
  // What every rank of one operation did. Rows are ranks in order; `place` is a rank's row.
  constructor(packed) {
    this.rank = unpack(packed.rank);
    this.host = unpackTexts(packed.host);
    this.state = unpack(packed.state);
    this.seconds = unpack(packed.seconds);
    this.nbytes = unpack(packed.nbytes);
    this.axes = Object.fromEntries(Object.entries(packed.axes).map(([name, column]) => [name, unpack(column)]));
    this.packed = packed;
    this.phases = this.unpackRows(packed.phases);
    this.known = new Map();
    this.places = new Map();
    this.rank.forEach((rank, place) => this.places.set(rank, place));
  }

  unpackRows(packed) {
    const counts = unpack(packed.counts);
    const first = new Int32Array(counts.length + 1);
    counts.forEach((count, place) => (first[place + 1] = first[place] + count));
    const seconds = unpack(packed.seconds);
    const failed = packed.failed ? unpack(packed.failed) : new Uint8Array(seconds.length);
    let begin = unpack(packed.begin);
    if (begin.length < seconds.length) begin = this.follow(begin, seconds, first);
    return { first, name: unpackTexts(packed.name), begin, seconds, failed };
  }

  // Each row of a rank begins when the one before ends; `firsts` has the beginnings of the first ones.
  follow(firsts, seconds, first) {
    const begin = new Float32Array(seconds.length);
    let used = 0;
    for (let place = 0; place + 1 < first.length; place++) {
      if (first[place] === first[place + 1]) continue;
      let now = firsts[used++];
      for (let row = first[place]; row < first[place + 1]; row++) {
        begin[row] = now;
        now += seconds[row];
      }
    }
    return begin;
  }

  get spans() {
    const packed = this.packed.spans;
    this.unpackedSpans ??= { ...this.unpackRows(packed), nbytes: unpack(packed.nbytes), subject: unpackTexts(packed.subject) };
    return this.unpackedSpans;
  }

  // Values that the heat map can show: [key, title].
  values() {
    const phases = this.phases.name.values.map((name) => [`phase:${name}`, `Phase: ${name}`]);
    const totals = Object.keys(this.packed.totals)
      .filter((name) => name !== "blocking")
      .map((name) => [`total:${name}`, `Time in ${name}, all threads`]);
    const blocking = "blocking" in this.packed.totals ? [["total:blocking", "Blocking time"]] : [];
    return [["seconds", "Whole operation"], ...blocking, ...phases, ["nbytes", "Bytes"], ...totals];
  }

  // The values of one key, one per row.
  column(key) {
    if (!this.known.has(key)) this.known.set(key, this.compute(key));
    return this.known.get(key);
  }

  compute(key) {
    const [kind, name] = [key.split(":")[0], key.slice(key.indexOf(":") + 1)];
    if (kind === "seconds") return this.seconds;
    if (kind === "nbytes") return this.nbytes;
    if (kind === "total") return unpack(this.packed.totals[name]);
    const { first, name: names, seconds } = this.phases;
    const code = names.values.indexOf(name);
    const sums = new Float32Array(this.rank.length);
    for (let place = 0; place < sums.length; place++)
      for (let row = first[place]; row < first[place + 1]; row++) if (names.codes[row] === code) sums[place] += seconds[row];
    return sums;
  }

  hostOf(place) {
    return this.host.values[this.host.codes[place]];
  }

  describe(place) {
    const axes = Object.entries(this.axes).map(([name, values]) => `${name} ${values[place]}`);
    return [this.hostOf(place), ...axes].filter(Boolean).join(", ");
  }

  // The rank whose whole operation took the median time, of those that did it.
  typicalPlace() {
    const done = [...this.rank.keys()].filter((place) => this.state[place] === 0);
    done.sort((a, b) => this.seconds[a] - this.seconds[b]);
    return done[Math.floor((done.length - 1) / 2)];
  }
}
