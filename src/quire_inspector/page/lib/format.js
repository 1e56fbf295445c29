// Numbers, bytes, times and shares as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

const known = (value) => typeof value === "number" && Number.isFinite(value);

export const format = Object.freeze({
  /** 12345.6 -> "12,346"; below 10 with up to `digits` decimals; "–" for what is no number. */
  number(value, digits = 0) {
    if (!known(value)) return "–";
    return digits ? new Intl.NumberFormat("en", { maximumFractionDigits: digits }).format(value) : whole.format(value);
  },
  /** 12345 -> "12.3k". */
  short(value) {
    if (!known(value)) return "–";
    return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value).replace("K", "k");
  },
  /** `count(1, "token")` -> "1 token", `count(2, "token")` -> "2 tokens". */
  count(value, noun, plural = `${noun}s`) {
    return `${format.number(value)} ${value === 1 ? noun : plural}`;
  },
  /** 1536 -> "1.5 KiB". */
  bytes(value) {
    if (!known(value)) return "–";
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
      value /= 1024;
      unit += 1;
    }
    return `${unit && Math.abs(value) < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
  },
  /** Seconds: 0.0012 -> "1.2 ms", 75 -> "1 min 15 s". */
  seconds(value) {
    if (!known(value)) return "–";
    if (value < 0) return `-${format.seconds(-value)}`;
    if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
    if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
    if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
    if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
    if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
    return `${Math.floor(value / 86400)} d ${Math.round((value % 86400) / 3600)} h`;
  },
  /** A share from 0 to 1: 0.256 -> "26 %"; small ones keep two digits. */
  share(value) {
    if (!known(value)) return "–";
    const percent = value * 100;
    if (percent > 0 && percent < 0.01) return "<0.01 %";
    return `${percent >= 10 || percent === 0 ? percent.toFixed(0) : percent.toPrecision(2)} %`;
  },
  /** Unix seconds as the reader's local time. */
  clock(value) {
    return known(value) ? new Date(value * 1000).toLocaleTimeString() : "–";
  },
  /** Unix seconds as the reader's local date and time. */
  date(value) {
    return known(value) ? new Date(value * 1000).toLocaleString() : "–";
  },
});
