// Arrays of numbers in documents: base64 of little-endian values.

/** @returns {ArrayBuffer} */
function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
  return bytes.buffer;
}

const LITTLE = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;

function typed(Kind, read) {
  return (text) => {
    const buffer = bytesOf(text ?? "");
    const size = Kind.BYTES_PER_ELEMENT;
    if (buffer.byteLength % size) throw new Error(`an array of ${buffer.byteLength} bytes is no array of ${size}-byte values`);
    if (LITTLE || size === 1) return new Kind(buffer);
    const view = new DataView(buffer);
    return Kind.from({ length: buffer.byteLength / size }, (_, at) => view[read](at * size, true));
  };
}

/**
 * Decoders by dtype: `decode.u2(text)` returns a Uint16Array.
 * @type {{u1: function(string): Uint8Array, u2: function(string): Uint16Array,
 *   i4: function(string): Int32Array, f4: function(string): Float32Array}}
 */
export const decode = Object.freeze({
  u1: typed(Uint8Array, "getUint8"),
  u2: typed(Uint16Array, "getUint16"),
  i4: typed(Int32Array, "getInt32"),
  f4: typed(Float32Array, "getFloat32"),
});
