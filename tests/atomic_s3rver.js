// Preloaded by tests/object_storage.py. s3rver answers a PUT before it has written the object, and a kill leaves half of
// it. A GET during a PUT answers with the new content in the old length. S3 does none of this, and an output relies on that.
"use strict";
const crypto = require("crypto");
const fs = require("fs");
const path = require("path");
const Store = require(process.env.S3RVER_STORE);

function replaceFile(target, content) {
  const temporary = `${target}.${crypto.randomUUID()}`;
  fs.writeFileSync(temporary, content);
  fs.renameSync(temporary, target);
}

Store.prototype.putObject = async function (object) {
  const chunks = [];
  if (Buffer.isBuffer(object.content)) chunks.push(object.content);
  else for await (const chunk of object.content) chunks.push(chunk);
  const content = Buffer.concat(chunks);
  const md5 = crypto.createHash("md5").update(content).digest("hex");
  const metadata = { "content-type": object.metadata["content-type"] };
  const pathOf = (resource) => this.getResourcePath(object.bucket, object.key, resource);
  fs.mkdirSync(path.dirname(pathOf("object")), { recursive: true });
  replaceFile(pathOf("metadata.json"), JSON.stringify(metadata)); // no other request is handled between these lines
  replaceFile(pathOf("object.md5"), md5);
  replaceFile(pathOf("object"), content);
  return { size: content.length, md5 };
};

const getObject = Store.prototype.getObject;
Store.prototype.getObject = async function (bucket, key, options) {
  for (;;) {
    const object = await getObject.call(this, bucket, key, options);
    const now = object && (await this.getMetadata(bucket, key).catch(() => null));
    if (!object || (now && now.etag === object.metadata.etag)) return object;
    if (object.content) object.content.destroy();
  }
};
